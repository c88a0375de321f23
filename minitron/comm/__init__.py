"""How ranks talk: how they are started, which groups they form, how they sum and share tensors."""
