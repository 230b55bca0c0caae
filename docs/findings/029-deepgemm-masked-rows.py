import sys

import deep_gemm
import torch

masked = getattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked", None) or deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
GROUPS, N, K = 5, 32, 256


def wrong(m: int) -> int:
    """Calls of 50 in which a row in use differs from the product."""
    torch.manual_seed(0)
    a = torch.randn(GROUPS, m, K, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(GROUPS, N, K, device="cuda").to(torch.float8_e4m3fn)
    a_scales = torch.ones(GROUPS, m, K // 128, device="cuda")
    b_scales = torch.ones(GROUPS, 1, K // 128, device="cuda")
    counts = torch.tensor([m, m // 2, 3, m, m // 3], dtype=torch.int32, device="cuda")
    used = torch.arange(m, device="cuda")[None, :] < counts[:, None]
    expected = torch.einsum("gmk,gnk->gmn", a.float(), b.float())
    failed = 0
    for _ in range(50):
        out = torch.zeros(GROUPS, m, N, dtype=torch.bfloat16, device="cuda")
        masked((a, a_scales), (b, b_scales), out, counts, m)
        error = (out.float() - expected).abs().amax(2)[used]
        failed += bool((error > 0.02 * expected.abs().max()).any())
    return failed


counts = {m: wrong(m) for m in (34, 100, 128, 256)}
for m, count in counts.items():
    print(f"M = {m}: {count} of 50 calls wrong, expected 0")
sys.exit(any(counts.values()))
