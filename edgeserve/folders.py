"""Where edgeserve keeps what it writes for its user: settings, data, caches, state.

Owns the four folders and the environment variables that move them. Knows nothing of what is kept in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs


def config_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """For what people write: EDGESERVE_CONFIG_DIR, or the platform's folder for settings."""
    return _chosen(environ, "EDGESERVE_CONFIG_DIR") or platformdirs.user_config_path("edgeserve")


def data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """For what is worth keeping (models, calibration, chats): EDGESERVE_DATA_DIR, or the platform's."""
    return _chosen(environ, "EDGESERVE_DATA_DIR") or platformdirs.user_data_path("edgeserve")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """For what can be found out again: EDGESERVE_CACHE_DIR, or the platform's folder for caches."""
    return _chosen(environ, "EDGESERVE_CACHE_DIR") or platformdirs.user_cache_path("edgeserve")


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """For histories: EDGESERVE_STATE_DIR, or the platform's folder for state."""
    return _chosen(environ, "EDGESERVE_STATE_DIR") or platformdirs.user_state_path("edgeserve")


def _chosen(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    return Path(value).expanduser() if value else None
