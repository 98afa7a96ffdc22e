"""These tests need a GPU that MAX can use; where there is none, none of them is collected."""

from max.driver import accelerator_count

collect_ignore_glob = [] if accelerator_count() else ["test_*.py"]
