"""What pyproject.toml cannot say: the part that is compiled, where it can be. See unisono.compiled."""

from pathlib import Path

from setuptools import Extension, setup

HERE = Path("src/compiled")
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers")

setup(
    ext_modules=[
        Extension(
            "unisono._compiled",
            sorted(map(str, HERE.glob("*.c"))),
            depends=sorted(map(str, HERE.glob("*.h"))),
            extra_compile_args=["-std=c11", *WARNINGS],
            optional=True,
        )
    ]
)
