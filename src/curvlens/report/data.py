"""What a report holds: frozen data, without torch; the page, the terminal and the findings are made from it alone.

Every number says whether it is exact or an estimate, and an estimate carries its error. A quantity that was not
measured is None or missing; NaN stands inside of tables where there is nothing to measure (a layer with fewer heads).
Lists are indexed as the docstrings say: `B` groups of parameters, `L` layers, `A` heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "curvlens-report/1"  # raise the number when a reader of the old one would go wrong

Status = Literal["exact", "estimated", "partial", "skipped", "failed"]
Severity = Literal["problem", "warning", "notice", "info"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "notice", "info")
PARTS = ("H", "H_o", "H_f")


@dataclass(frozen=True)
class Number:
    """One measured number. An estimate's `stderr` is one standard error, an eigenvalue's its residual."""

    label: str
    value: float
    stderr: float = 0.0
    exact: bool = True
    converged: bool = True
    samples: int = 0
    products: int = 0
    note: str = ""

    def __str__(self) -> str:
        if self.exact:
            return shown(self.value)
        return with_error(self.value, self.stderr)


@dataclass(frozen=True)
class Stage:
    """One part of the analysis: whether it was done, how exactly, and if not, why."""

    name: str
    title: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    products: int = 0


@dataclass(frozen=True)
class Meta:
    """What was analysed, with what, and at what cost."""

    title: str
    model: str  # its class
    family: str
    parameters: int
    layers: int
    heads: int  # of the widest layer
    loss: str
    scored_tokens: float
    sequences: int
    batches: int
    engine: str
    dtype: str
    device: str
    preset: str
    seed: int
    seconds: float
    products: int
    created: str  # UTC, ISO 8601
    versions: dict[str, str]
    weights_sha256: str
    data_sha256: str
    notes: list[str] = field(default_factory=list)
    optimizer: str = ""


@dataclass(frozen=True)
class Finding:
    """A sentence that the numbers carry, with what it rests on and what to do."""

    id: str
    severity: Severity
    title: str
    text: str
    evidence: list[str]
    uncertainty: str
    action: str
    source: str  # the theorem or paper behind it
    blocks: list[str] = field(default_factory=list)  # names of groups


@dataclass(frozen=True)
class Group:
    """Some parameters that are shown as one: a row of every map.

    `role` is "query", "key", "value", "out", "up", "down", "gate", "norm", "embed", "head" or "other"; `layer` is None
    outside of the layers. `gradient` is the norm of the loss's gradient there, `weight` that of the parameters.
    """

    name: str  # "layer.0.attn.query"
    label: str  # "0 query"
    layer: int | None
    role: str
    size: int
    blocks: list[str]  # the blocks of the landscape in it
    heads: int = 0
    gradient: float = math.nan
    weight: float = math.nan


@dataclass(frozen=True)
class Map:
    """`‖M_ab‖_F` for every two rows, `[R][R]`, of one of the matrices.

    `names` are groups, or where those are too many sublayers ("layer.0.attn") or layers ("layer.0").
    """

    names: list[str]
    value: list[list[float]]
    stderr: list[list[float]]
    exact: bool
    samples: int = 0


@dataclass(frozen=True)
class Column:
    """One number a group, `[B]`."""

    value: list[float]
    stderr: list[float]
    exact: bool
    samples: int = 0


@dataclass(frozen=True)
class HeadTable:
    """The functional curvature of every head, split at the output of its own layer: `[L][A]` each.

    `norms` and `traces` have the blocks QQ, QK, VQ (one a query head), KK, VK (one a key head). `moments` has "first"
    `‖M1 − mean‖`, "second" `tr M2` and "third" `|tr M3[w]|`, means over queries; entropy is in nats, and
    `entropy_limit` that of attention spread evenly over all tokens in sight.
    """

    layers: list[str]
    norms: dict[str, list[list[float]]]
    stderr: dict[str, list[list[float]]]
    exact: dict[str, list[bool]]
    traces: dict[str, list[list[float]]]
    entropy: list[list[float]]
    moments: dict[str, list[list[float]]]
    entropy_limit: float = math.nan
    omitted: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Depth:
    """One sublayer: curvature of the loss by the stream at its start, `total = passed + created`.

    Each has the keys "trace", "frobenius" and, where measured, "smallest" and "largest" (eigenvalues).
    """

    name: str
    passed: dict[str, Number]
    created: dict[str, Number]
    total: dict[str, Number]


@dataclass(frozen=True)
class NormGains:
    """Every norm: the deviation of what enters it, and `gain`, by how much it scales a change of that.

    `deviation` is √(mean over tokens of var), `gain` is √(mean of γ² / (var + ε)) over tokens and features, and
    `epsilon` the mean share of ε in var + ε. For RMSNorm `var` is the mean square.
    """

    names: list[str]
    deviation: list[float]
    gain: list[float]
    epsilon: list[float]


@dataclass(frozen=True)
class Eigenpair:
    """An eigenvalue of H with its residual; `mass[B]`, the share of the eigenvector's square in each group."""

    value: float
    residual: float
    mass: list[float]
    gradient: float  # cos² between eigenvector and gradient
    exact: bool = False


@dataclass(frozen=True)
class Curve:
    """A spectral density on a grid: mass a bin of `t = asinh(x / threshold)`, or of x where threshold is 0.

    `nodes` and `weights` are those of the first probe's quadrature; where exact, the outermost eigenvalues and 1/n.
    """

    name: str
    size: int
    exact: bool
    eigenvalues: list[float]  # the grid, as eigenvalues
    density: list[float]  # sums to one with the step in t
    stderr: list[float]
    threshold: float
    step: float
    nodes: list[float]
    weights: list[float]
    samples: int = 0


@dataclass(frozen=True)
class Spectra:
    """The spectrum of each group's diagonal block on one common grid, and how unlike they are.

    `divergence[i][j]` is the Jensen-Shannon divergence in nats, at most ln 2; `names` say which groups.
    """

    names: list[str]
    curves: list[Curve]
    divergence: list[list[float]]
    stderr: list[list[float]]


@dataclass(frozen=True)
class BoundRow:
    """A certified upper bound of the spectral norm of a block of H, beside its true norm."""

    row: str
    column: str
    outer: float
    functional: float
    total: float
    true: float  # NaN where it was not computed


@dataclass(frozen=True)
class Sharpness:
    """The largest eigenvalue as gradient descent, or an optimizer, sees it; `threshold` NaN where none is known."""

    label: str
    value: Number
    threshold: float
    rule: str
    rate: float  # the learning rate in use; NaN where there is none
    largest_rate: float  # the largest stable one


@dataclass(frozen=True)
class Noise:
    """How much a number moves from one part of the data to another: each part's value, their spread.

    `stderr` is the error of the mean over parts, what another draw of as much data would change.
    """

    label: str
    values: list[float]
    mean: float
    spread: float
    stderr: float


@dataclass(frozen=True)
class Report:
    """All that an analysis found. `numbers` has the keys that `NUMBERS` lists; maps are keyed by "H", "H_o", "H_f"."""

    meta: Meta
    stages: list[Stage]
    numbers: dict[str, Number]
    findings: list[Finding]
    groups: list[Group]
    maps: dict[str, Map] = field(default_factory=dict)
    traces: dict[str, Column] = field(default_factory=dict)
    eigenpairs: list[Eigenpair] = field(default_factory=list)
    spectrum: Curve | None = None
    spectra: Spectra | None = None
    heads: HeadTable | None = None
    depth: list[Depth] = field(default_factory=list)
    bounds: list[BoundRow] = field(default_factory=list)
    sharpness: list[Sharpness] = field(default_factory=list)
    noise: list[Noise] = field(default_factory=list)
    norms: NormGains | None = None

    # -- writing and reading

    def to_dict(self) -> dict[str, Any]:
        from curvlens.report.schema import encode

        return {"schema": SCHEMA, **encode(self)}

    def to_json(self, path: Any = None, indent: int | None = None) -> str:
        """The report as JSON; written to `path` where one is given, all of it or nothing."""
        from curvlens.report.files import write
        from curvlens.report.schema import text

        content = text(self.to_dict(), indent)
        if path is not None:
            write(path, content)
        return content

    @classmethod
    def from_json(cls, source: Any) -> Report:
        """From the path of a JSON file or of a page, or from their text."""
        from curvlens.report.files import read
        from curvlens.report.schema import decode_report

        return decode_report(read(source), cls)

    def to_html(self, path: Any = None) -> str:
        """The whole page, one file without any request; written to `path` where one is given."""
        from curvlens.report.files import write
        from curvlens.report.page import html

        content = html(self)
        if path is not None:
            write(path, content)
        return content

    def figures(self, folder: Any) -> list[Any]:
        """Every figure as PNG and SVG in a folder; the paths."""
        from curvlens.report.figures import save

        return save(self, folder)

    def show(self) -> None:
        """The whole page: in the cell of a notebook, or in the browser."""
        from curvlens.report.notebook import show

        show(self)

    # -- asking

    def stage(self, name: str) -> Stage | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def complete(self) -> bool:
        """Whether every stage that could be done was done."""
        return not any(stage.status in ("partial", "failed") for stage in self.stages)

    @property
    def converged(self) -> bool:
        return self.complete and all(number.converged for number in self.numbers.values())

    def __str__(self) -> str:
        from curvlens.report.terminal import text

        return text(self)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from curvlens.report.notebook import cell

        return {"text/plain": str(self), "text/html": cell(self)}


# key in Report.numbers: what it is
NUMBERS = {
    "loss": "loss",
    "gradient_norm": "norm of the gradient",
    "parameter_norm": "norm of the parameters",
    "lambda_max": "largest eigenvalue of H",
    "lambda_min": "smallest eigenvalue of H",
    "condition": "largest over smallest positive curvature that was resolved",
    "negative_curvature": "negative share of the curvature, sum of |λ|",
    "negative_count": "share of negative eigenvalues",
    "effective_rank": "effective rank of H",
    "trace.H": "trace of H",
    "trace.H_o": "trace of H_o",
    "trace.H_f": "trace of H_f",
    "frobenius.H": "Frobenius norm of H",
    "frobenius.H_o": "Frobenius norm of H_o",
    "frobenius.H_f": "Frobenius norm of H_f",
    "gradient_curvature": "curvature along the gradient, gᵀHg / gᵀg",
    "gradient_alignment": "share of the gradient in the top eigenvectors",
    "best_step": "step along the gradient that lowers the quadratic model most",
}


# -- how a number is shown, everywhere


def shown(value: float, digits: int = 4) -> str:
    if math.isnan(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 2}e}"


def with_error(value: float, stderr: float) -> str:
    """`1.234 ± 0.056`: the value to the digits that its error leaves it."""
    if not math.isfinite(stderr):
        return f"{shown(value)} ± ?"
    if not math.isfinite(value):
        return "–"
    if stderr <= 1e-12 * abs(value):
        return shown(value)
    digits = 2 + max(0, math.floor(math.log10(abs(value) / stderr))) if value else 2
    return f"{shown(value, min(digits + 1, 6))} ± {shown(stderr, 2)}"
