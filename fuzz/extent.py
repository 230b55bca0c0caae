"""How much a case draws and asks for, from its text alone: what takes time before and after anything is called.

Only the standard library is imported.
"""

from __future__ import annotations

from fuzz.case import Case

LARGE = 2**26
"""Elements of a case that take longer to draw than most calls take."""


def is_large(case: Case) -> bool:
    """Whether the inputs of a case take seconds to draw."""
    return elements(case) > LARGE


def elements(case: Case) -> int:
    """Elements of a case's matrices, scales left out."""
    match case.operation:
        case "moe":
            experts, hidden, inner, tokens = _sizes(case, "experts", "hidden", "intermediate", "tokens")
            return 3 * experts * hidden * inner + tokens * hidden
        case "gemm":
            m, n, k = _sizes(case, "m", "n", "k")
            return (m + n) * k
        case "grouped_gemm":
            groups, m, n, k = _sizes(case, "groups", "m", "n", "k")
            return ((groups if case["grouping"] == "masked" else 1) * m + groups * n) * k
        case "quantize" | "dequantize":
            m, k = _sizes(case, "m", "k")
            return m * k
        case "requantize":
            n, k = _sizes(case, "n", "k")
            return n * k
        case "scale_layout":
            rows, columns = _sizes(case, "rows", "cols")
            return rows * columns
        case "routing":
            tokens, experts = _sizes(case, "tokens", "experts")
            return tokens * experts
    return case.integer("n")


def extent(case: Case) -> int:
    """Elements of a case's matrices and of its output."""
    return elements(case) + outputs(case)


def outputs(case: Case) -> int:
    """Elements of the output of a product or a layer; 0 for other operations, whose outputs are like their inputs."""
    match case.operation:
        case "moe":
            tokens, hidden = _sizes(case, "tokens", "hidden")
            return tokens * hidden
        case "gemm":
            m, n = _sizes(case, "m", "n")
            return m * n
        case "grouped_gemm":
            groups, m, n = _sizes(case, "groups", "m", "n")
            return (groups if case["grouping"] == "masked" else 1) * m * n
    return 0


def _sizes(case: Case, *keys: str) -> tuple[int, ...]:
    return tuple(case.integer(key) for key in keys)
