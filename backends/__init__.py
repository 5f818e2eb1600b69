"""Model execution behind the contract of `flowrl.backend`; found by name through the runtime's registry."""
