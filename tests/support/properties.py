"""The number of cases that Hypothesis draws: a test says how many it needs, the run's profile scales that.

`quick` draws a quarter, `default` what the tests say, `long` 40 times: a state machine of 100 cases and 50 steps then
takes 200,000 steps.
"""

from hypothesis import settings

PERCENT = {"quick": 25, "default": 100, "long": 4000}

for _name, _percent in PERCENT.items():
    settings.register_profile(_name, max_examples=_percent, deadline=None)


def load_profile(name: str | None, *, quick: bool) -> None:
    """The profile of `--hypothesis-profile`, else that of the tier."""
    settings.load_profile(name or ("quick" if quick else "default"))


def examples(count: int) -> int:
    """The number of cases where the default profile draws `count`."""
    return max(1, count * settings().max_examples // 100)
