"""The user's own modules, which are installed nowhere: their files, and hashes that tell whether they have changed."""

from raypfl.common.user_modules.digests import digests_named_in, edited_files, source_digest
from raypfl.common.user_modules.files import copy_files, module_files, modules_named_in

__all__ = ["copy_files", "digests_named_in", "edited_files", "module_files", "modules_named_in", "source_digest"]
