"""Registers, spills and shared memory of the attention kernels, compiled for a GPU that need not be there.

`python benchmarks/attention_registers.py [capability]`, 90 unless given, wants Triton; one line a kernel and tile.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from curvlens.kernels import fused_kernels
from curvlens.kernels.fused import TILES

SUMS = {"lse", "delta", "lse_dot", "delta_dot", "mean", "mean_dot"}  # float32 whatever the inputs are
FORMS = {
    "tangent": [{}],
    "query_tangent": [{"MOVING": True}],
    "key_tangent": [
        {"MOVING": True, "KEYS": keys, "VALUES": values}
        for keys, values in ((True, True), (True, False), (False, True))
    ],
}


def resources(name: str, dtype: str, capability: int, warps: int, stages: int, **form: object) -> str:
    kernel = getattr(fused_kernels, name)
    signature = {}
    for argument in kernel.arg_names:
        if argument in form:
            signature[argument] = "constexpr"
        elif argument == "scale":
            signature[argument] = "fp32"
        elif argument in ("samples", "heads", "shared", "L", "M") or argument.startswith("mask_"):
            signature[argument] = "i32"
        else:
            signature[argument] = "*fp32" if argument in SUMS else f"*{dtype}"
    places = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    aligned = [a for a, kind in signature.items() if kind.startswith("*") or a in ("L", "M")]
    source = ASTSource(
        kernel,
        signature,
        {places[a]: value for a, value in form.items()},
        {places[a]: [["tt.divisibility", 16]] for a in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    used = dict(part.split(":") for part in text.split("Function")[-1].split() if part.count(":") == 1)
    return f"{used['REG']:>4} registers {used['STACK']:>5} bytes spilt {made.metadata.shared:>7} bytes shared"


def main() -> None:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    for dtype, size, tangents in (("bf16", 64, 1), ("bf16", 64, 2), ("bf16", 128, 1), ("fp32", 64, 1)):
        for name, forms in FORMS.items():
            for form in forms:
                for rows, columns, warps, stages in TILES:
                    used = resources(
                        name, dtype, capability, warps, stages,
                        D=size, E=size, WIDE_D=size, WIDE_E=size, CAUSAL=True, WINDOW=0, MASK=0,
                        TANGENTS=tangents, PRECISION="tf32x3", ROWS=rows, COLUMNS=columns, **form,
                    )  # fmt: skip
                    made = "".join(part[0] for part in ("KEYS", "VALUES") if form.get(part))
                    tile = f"{rows:>3} x {columns:<3} {warps} warps {stages} stages"
                    print(
                        f"{name:>13} {made:<2} {dtype} {size:>3}, {tangents} tangents, {tile}: {used}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
