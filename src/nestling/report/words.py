"""Numbers and lists as people read them: 8.3 (of 0.083), 24.4 M, 1.2 ms, "a, b and c"."""


def percent(value: float) -> str:
    return f"{100 * value:.1f}" if abs(value) >= 0.0995 else f"{100 * value:.2f}"


def count_text(value: float) -> str:
    """A large number in three digits: 24.4 M, 387 k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}\u00a0{unit}"
    return f"{value:.3g}"


def time_text(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds >= 0.1 else f"{1000 * milliseconds:.3g} µs"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def listed(words: list[str]) -> str:
    """["a", "b", "c"] as "a, b and c"."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1] if words else "") if part)
