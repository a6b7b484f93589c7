"""Configurations of each kernel family."""
