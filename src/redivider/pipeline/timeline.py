"""`diagnostics.timeline`, under the name that it had."""

from redivider.pipeline.diagnostics.timeline import draw as draw
from redivider.pipeline.diagnostics.timeline import measured_spans as measured_spans
from redivider.pipeline.diagnostics.timeline import planned_spans as planned_spans
from redivider.pipeline.diagnostics.timeline import write_chrome_trace as write_chrome_trace
