"""One script per question: what decoding costs on the CPU (`decode_cpu`), what the API itself costs (`api_overhead`)."""
