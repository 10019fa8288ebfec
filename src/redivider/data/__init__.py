"""Data sources, one file per source, and their batches by step."""

from redivider.data.batches import Batches as Batches
from redivider.data.catalogue import Source as Source
from redivider.data.catalogue import list_data as list_data
from redivider.data.catalogue import load as load
from redivider.data.errors import DataError as DataError
from redivider.data.folder import Folder as Folder
from redivider.data.images import Images as Images
from redivider.data.text import Text as Text

__all__ = ["Batches", "DataError", "Folder", "Images", "Source", "Text", "list_data", "load"]
