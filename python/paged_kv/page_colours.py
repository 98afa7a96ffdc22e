"""The colours of pages, in pictures and in a browser."""

COLOURS = {"used": "#d9480f", "cached": "#f4b183", "free": "#e9ecef"}


def shades(count: int) -> list[str]:
    """Colours of 1 to `count` owners, darker with each."""
    return [f"#{round(217 - 150 * i / count):02x}{round(72 - 50 * i / count):02x}0f" for i in range(count)]
