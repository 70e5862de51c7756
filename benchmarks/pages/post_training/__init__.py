"""Post-training quantization of ResNet-20: the methods, other tools, and their comparison on the same images."""
