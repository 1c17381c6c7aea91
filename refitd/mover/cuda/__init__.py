"""Another process's device memory, mapped into this one."""
