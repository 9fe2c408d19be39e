"""kgen: CUDA kernels for conv + pointwise chain + GroupNorm blocks, generated for one shape.

    spec = kgen.load_spec("spec.yaml")          # YAML -> Spec, or SpecError with every issue
    kgen.emit(spec, "generated")                # Spec -> package folder
    kgen.build(spec, ["sm_90a"], "generated")   # the same with cubins beside it
    report = kgen.verify(spec)                  # on the current CUDA device, against fp64
    block = kgen.load("spec.yaml")              # a torch.nn.Module

Importing kgen imports neither torch nor CUDA; what needs them says so when it is called.
The functions emit, build and verify hide the modules of the same name: `from kgen.emit import
render` works, `kgen.emit` is the function.
"""

from kgen.build import build
from kgen.emit import emit
from kgen.errors import BuildError, CheckError, Issue, KgenError, SpecError, UsageError
from kgen.importers import import_module, optimize
from kgen.package import load
from kgen.plan import Plan, make_plan
from kgen.spec import Spec, json_schema, load_spec
from kgen.verdict import Report
from kgen.verify import verify
from kgen.version import __version__

__all__ = [
    "BuildError",
    "CheckError",
    "Issue",
    "KgenError",
    "Plan",
    "Report",
    "Spec",
    "SpecError",
    "UsageError",
    "__version__",
    "build",
    "emit",
    "import_module",
    "json_schema",
    "load",
    "load_spec",
    "make_plan",
    "optimize",
    "verify",
]
