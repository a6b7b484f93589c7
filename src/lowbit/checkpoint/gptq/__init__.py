"""GPTQ checkpoints: settings.py (the quantization_config), zeros.py, file_zeros.py (zero points), reader.py (modules)."""
