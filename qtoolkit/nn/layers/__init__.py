"""QAT layers, by the layers of torch that they replace."""
