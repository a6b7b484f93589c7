"""GPTQ checkpoints: settings.py (the config), zeros.py, file_zeros.py (zero points), reader.py (modules)."""
