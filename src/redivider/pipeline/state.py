"""`StateError`, under the name that it had."""

from redivider.pipeline.checkpoint.files import StateError as StateError
