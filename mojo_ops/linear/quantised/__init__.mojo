"""Products with weights in GGUF's blocks, on the CPU."""
