"""One script per question: `decode_cpu`, what decoding costs on the CPU; `api_overhead`, what the API itself costs."""
