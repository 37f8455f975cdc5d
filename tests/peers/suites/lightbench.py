"""LightBench's problems of exploding and adversarial gradients."""
