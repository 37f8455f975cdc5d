"""The parts of the demo: the data, the model, the chains, the race, the picture and the report."""
