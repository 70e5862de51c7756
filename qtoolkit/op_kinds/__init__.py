"""The table of op kinds, and the lookup of a graph's nodes in it: facts, rules and recorded functions."""
