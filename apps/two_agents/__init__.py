"""Two policies in one episode: a proposer writes tasks, a solver answers them; both are trained."""
