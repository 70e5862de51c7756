"""The table of op kinds, and what finds a graph's nodes in it: facts, rules and recorded functions."""
