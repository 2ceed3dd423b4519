namespace pynixlkv::kv {}
