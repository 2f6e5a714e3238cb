"""In the place of `torch._meta_registrations`: the one thing that what it imports does for everybody."""

import torch
from torch._library.opaque_object import OpaqueBaseMeta

torch._C._set_generator_metaclass(OpaqueBaseMeta)
