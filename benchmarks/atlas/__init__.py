"""What every rule does to every trouble of the gradient, without training.

    python -m benchmarks.atlas                        # all, into benchmarks/results
    python -m benchmarks.atlas --rules ZClip --print  # some of it, on the screen

docs/atlas.md is made of these files when the documentation is built.
"""
