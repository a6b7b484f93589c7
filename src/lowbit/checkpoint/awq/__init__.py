"""AWQ checkpoints: layouts.py (where codes and zero points are), reader.py (modules)."""
