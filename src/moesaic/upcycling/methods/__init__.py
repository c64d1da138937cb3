"""The registry of methods: a new one is one file and its line here (and its import). Importing it imports no torch."""

from moesaic.upcycling.method import Method
from moesaic.upcycling.methods.btx import BTX
from moesaic.upcycling.methods.divmoe import DIVMOE
from moesaic.upcycling.methods.drop import DROP
from moesaic.upcycling.methods.scratch import SCRATCH
from moesaic.upcycling.methods.sparse import SPARSE
from moesaic.upcycling.methods.virtual_group import VIRTUAL_GROUP

METHODS: dict[str, Method] = {
    "scratch": SCRATCH,
    "sparse": SPARSE,
    "drop": DROP,
    "virtual_group": VIRTUAL_GROUP,
    "btx": BTX,
    "divmoe": DIVMOE,
}
