// The parts of code that have colours: words of the language, strings, numbers, comments.

const MOST_CHARACTERS = 20000;
const HASH = new Set("bash sh shell zsh console python py ruby rb yaml yml toml r perl make dockerfile".split(" "));
const DASHES = new Set("sql lua haskell hs".split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "markdown", "md", "diff"]);
const WORDS = new Set(
  ("abstract and as assert async await begin bool boolean break case catch char class const continue def default " +
    "defer del delete do done double elif else end enum esac except export extends extern false fi final finally " +
    "float fn for foreach from func function global go goto if impl implements import in int interface is lambda " +
    "let long loop match mod mut namespace new nil None not null or override package pass private protected pub " +
    "public raise return self short static string struct super switch template then this throw throws trait true " +
    "True False try type typedef typeof undefined union unsafe use using var virtual void where while with yield " +
    "select insert update delete create table values into join group order by limit on SELECT INSERT UPDATE DELETE " +
    "CREATE TABLE VALUES INTO JOIN GROUP ORDER BY LIMIT ON FROM WHERE AND OR NOT NULL AS SET").split(" "),
);
const STRING = /"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|`(?:[^`\\]|\\[^])*`?/.source;
const NUMBER = /\b\d[\w.]*/.source;
const NAME = /[A-Za-z_$][\w$]*/.source;

/** Return `[kind, text]` of the parts of a text; the kind of most is null. */
export function codeParts(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > MOST_CHARACTERS) return [[null, text]];
  const pattern = new RegExp(`(${commentOf(name)})|(${STRING})|(${NUMBER})|${NAME}`, "g");
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    const [all, comment, quoted, number] = found;
    const kind = comment ? "comment" : quoted ? "string" : number ? "number" : WORDS.has(all) ? "word" : null;
    if (kind === null) continue;
    if (found.index > end) parts.push([null, text.slice(end, found.index)]);
    parts.push([kind, all]);
    end = found.index + all.length;
  }
  if (end < text.length) parts.push([null, text.slice(end)]);
  return parts;
}

function commentOf(language) {
  if (HASH.has(language)) return "#[^\\n]*";
  if (DASHES.has(language)) return "--[^\\n]*";
  if (["html", "xml", "svg"].includes(language)) return "<!--(?:[^-]|-(?!->))*(?:-->)?";
  return "//[^\\n]*|/\\*(?:[^*]|\\*(?!/))*(?:\\*/)?";
}
