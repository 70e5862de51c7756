"""Thin adapters, so that scripts written for other tools run after one changed import."""
