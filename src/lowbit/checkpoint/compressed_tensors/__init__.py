"""compressed-tensors `pack-quantized`: read as a scheme of Hugging Face directories, and written."""
