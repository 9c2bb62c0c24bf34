"""bfloat16 on CPUs: only where they multiply it themselves."""

import pytest

from dsft.runtime.hardware import cpu_computes_bfloat16


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("flags : fpu avx512f avx512_bf16", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("flags : fpu avx512f avx512_vnni", False),
    ],
)
def test_a_cpu_that_multiplies_bfloat16_is_known_by_its_flags(tmp_path, flags, native):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert cpu_computes_bfloat16(tmp_path / "cpuinfo") is native
