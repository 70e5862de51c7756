"""What benchmarks/train_step.py and benchmarks/memory.py share: networks, subjects, demands and tables."""
