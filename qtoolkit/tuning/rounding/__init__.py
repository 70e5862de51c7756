"""The rounding of weights, learned: units of a graph, what they are learned from, and how."""
