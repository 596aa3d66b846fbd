"""From a bundle to its running engine."""

from __future__ import annotations

from importlib import metadata

from edge_rt.bundle import Bundle
from edge_rt.runtime.base import Runner
from edge_rt.runtime.null import NullRunner
from edge_rt.runtime.ort import MODEL_FILE, OrtRunner


def open_engine(bundle: Bundle) -> Runner:
    """Load the bundle's engine; BundleError for files or libraries that are not as it needs.

    Files are compared by size only; their hashes are for `edge-rt verify`.
    """
    bundle.check_files(hashes=False)
    bundle.check_libraries(installed_libraries())
    recipe, limits = bundle.manifest.recipe, bundle.manifest.limits()
    if recipe.engine == "null":
        return NullRunner(limits, recipe.null)
    return OrtRunner(bundle.path / MODEL_FILE, limits, recipe.ort)


def installed_libraries() -> dict[str, str]:
    """Versions of the inference libraries that this environment has."""
    # Both distributions bring the module onnxruntime.
    names = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime")}
    found: dict[str, str] = {}
    for library, distributions in names.items():
        for distribution in distributions:
            try:
                found[library] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return found
