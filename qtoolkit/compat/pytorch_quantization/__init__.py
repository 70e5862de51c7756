"""NVIDIA's pytorch-quantization: the same names, defaults, numbers and errors over qtoolkit's ops and modules."""
