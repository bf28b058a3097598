"""How clients average what each of them holds."""
