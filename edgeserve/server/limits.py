"""What one client may ask of the server at most: sizes, counts and times.

Owns the numbers, so that tests can shrink them and the documentation can quote them. Bounds on sampling
options live with the options (engine/sampling_params.py); the size of a body is the user's (ServerConfig).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_messages: int = 2048
    max_n: int = 16
    """Choices of one prompt."""
    max_prompts: int = 64
    """Prompts in one completion request; prompts times n is held to the same number."""
    max_template_chars: int = 1 << 20
    max_rendered_chars: int = 32 << 20
    template_start_s: float = 30.0
    """Time for the rendering process to start and compile the template."""
    template_render_s: float = 10.0
    header_s: float = 15.0
    """Time from the connection, or the first byte of a later request, to the end of the headers."""
    body_s: float = 60.0
    engine_stuck_s: float = 60.0
    """Work to do and no sign of life from the engine's thread for this long: reported as stuck."""
