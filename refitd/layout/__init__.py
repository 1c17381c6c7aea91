"""What a rank holds: boxes of logical tensors as strided views of storages. Pure; torch only in its front end."""

from refitd.layout.box import Box, Piece
from refitd.layout.dtypes import CASTS, ITEMSIZE, cast_allowed
from refitd.layout.layout import Layout
from refitd.layout.side import Side, SideBuilder
from refitd.layout.side_factor import side_from_layouts
from refitd.layout.sides import check_match, check_side

__all__ = [
    "CASTS",
    "ITEMSIZE",
    "Box",
    "Layout",
    "Piece",
    "Side",
    "SideBuilder",
    "cast_allowed",
    "check_match",
    "check_side",
    "side_from_layouts",
]
