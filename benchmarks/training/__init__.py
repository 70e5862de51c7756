"""What benchmarks/pages/train_step.py and benchmarks/pages/memory.py share: networks, subjects, demands and tables."""
