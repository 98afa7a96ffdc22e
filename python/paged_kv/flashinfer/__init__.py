"""FlashInfer's modules under FlashInfer's names, on any arrays; `import paged_kv as flashinfer` finds them too."""
