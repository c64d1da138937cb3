// Results of evaluations: filled when the format is there.

function resultsOverview() {
  return null;
}
