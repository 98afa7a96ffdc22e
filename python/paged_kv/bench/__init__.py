"""The benchmark of `paged-kv bench`: decode on the CPU against the machine's own bandwidth and other systems.

For every case of `cases.py`: our kernels, the fastest read loop and one peer take turns in a process of their own;
medians of at least 9 runs; every copy of the operands is used once before any is used again; results are checked
against float64. It takes up to 6 GB of memory (16 GB for the longest case). It prints a table and writes a JSON file by
the name of the CPU family (LLVM's name of the target that the kernels are compiled for: znver5). Nothing imports this
package but `paged_kv.commands.bench`, when it is called. A checkout has more cases, peers and targets, on top of
this: `python -m benchmarks.decode_cpu`.
"""
