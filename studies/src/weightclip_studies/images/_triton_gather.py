"""The body of the fused gather, compiled by Triton on CUDA machines; empty where there is no Triton."""

# Triton reads the annotations below as objects, so they are not postponed.
# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportOptionalMemberAccess=false
try:
    import triton.language as tl
except ImportError:
    tl = None

if tl is not None:

    def gather_kernel(codes, rows, half, turned, count, width, BR: tl.constexpr, BC: tl.constexpr):
        """One tile: read BR x BC codes of the chosen rows, write them as bfloat16 and, turned, as int8."""
        r = tl.program_id(0) * BR + tl.arange(0, BR)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        index = tl.load(rows + r, mask=r < count, other=0).to(tl.int64)
        inside = (r < count)[:, None] & (c < width)[None, :]
        value = tl.load(codes + index[:, None] * width + c[None, :], mask=inside, other=0)
        place = r[:, None].to(tl.int64) * width + c[None, :]
        tl.store(half + place, value.to(tl.float32).to(tl.bfloat16), mask=inside)
        turn = c[:, None].to(tl.int64) * count + r[None, :]
        tl.store(turned + turn, tl.trans(value), mask=(c < width)[:, None] & (r < count)[None, :])
