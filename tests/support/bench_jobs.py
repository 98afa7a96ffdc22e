"""Results of jobs of the decode benchmark that did not run."""

FACTS = {"machine": "a machine", "date": "2026-11-21"}


def fake_job(ours_s, read_gb, peer_s=None, *, peer_right=True, right=True, size=1000):
    """A result as `job.measure` returns it."""
    result = {
        "ours": {"name": "paged-kv", "seconds": [ours_s * 3, ours_s, ours_s / 2], "error": 1e-3, "right": right},
        "read": {"seconds": [size / read_gb / 1e9] * 3, "bytes": size},
        "copy": {"seconds": [2 * size / read_gb / 1e9] * 3, "bytes": size},
    }
    if peer_s is not None:
        result["peer"] = {"name": "peer", "seconds": [peer_s] * 3, "error": 2e-3, "right": peer_right}
    return result
