//! The live view.

use super::snapshot::{Sample, Snapshot};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Gauge, Row, Table};
use ritornello_terminal::exit::Failure;
use ritornello_terminal::print::{percent, print_stderr};
use signal_hook::consts::{SIGHUP, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const REFRESH: Duration = Duration::from_secs(1);
/// Width of the column of labels, in characters. The longest label has eight.
const NAME_WIDTH: u16 = 10;

/// Shown while the store has no owner.
const UNOWNED: &str = "no process owns the store: waiting for an owner";

/// Takes a sample; returns `None` if no process owns the store.
type Sampler<'a> = &'a dyn Fn() -> Result<Option<Sample>, Failure>;

/// Waits until a process owns the store, and draws the store until the user or a signal ends the
/// view.
///
/// # Errors
/// If a sample before the first drawing fails, or the terminal cannot be drawn on.
pub fn watch(sample: Sampler<'_>) -> Result<(), Failure> {
    let mut last = first(sample)?;
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let mut terminal = ratatui::try_init()?;
    let mut trouble = String::new();
    let mut shown = Snapshot::between(None, &last);
    let result = loop {
        if let Err(error) = terminal.draw(|frame| draw(frame, &shown, &trouble)) {
            break Err(error.into());
        }
        match quit_within(REFRESH) {
            Ok(true) => break Ok(()),
            Err(error) => break Err(error.into()),
            Ok(false) if ended.load(Ordering::Relaxed) => break Ok(()),
            Ok(false) => {}
        }
        match sample() {
            Ok(Some(now)) => {
                shown = Snapshot::between(Some(&last), &now);
                last = now;
                trouble.clear();
            }
            // Keep the last figures on the screen, because the store may be changing its owner.
            Ok(None) => trouble = UNOWNED.to_owned(),
            Err(failure) => trouble = failure.line,
        }
    };
    ratatui::restore();
    result
}

/// Takes the first sample as soon as a process owns the store. Until then Ctrl-C ends the command.
fn first(sample: Sampler<'_>) -> Result<Sample, Failure> {
    if let Some(owned) = sample()? {
        return Ok(owned);
    }
    print_stderr(&format!("{UNOWNED} (Ctrl-C ends)"));
    loop {
        // No event tells that a process takes the lock.
        std::thread::sleep(REFRESH);
        if let Some(owned) = sample()? {
            return Ok(owned);
        }
    }
}

/// Waits for `time`; returns true early if the user ends the view.
fn quit_within(time: Duration) -> std::io::Result<bool> {
    let deadline = Instant::now() + time;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if !event::poll(left)? {
            return Ok(false);
        }
        // Any event that is not a key, such as a resize, ends the wait, so that the screen is drawn
        // again.
        let Event::Key(key) = event::read()? else { return Ok(false) };
        let interrupted =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        let pressed = key.kind == KeyEventKind::Press;
        if pressed && (interrupted || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)) {
            return Ok(true);
        }
    }
}

fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, trouble: &str) {
    let lines = snapshot.lines();
    let parts = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ]);
    let [full, hits, _, figures, foot] = parts.areas(frame.area());
    frame.render_widget(gauge("full", snapshot.fullness(), Color::Blue), full);
    let rate = snapshot.hits().unwrap_or(0.0);
    frame.render_widget(gauge("hits", rate, Color::Green), hits);
    let width = usize::from(figures.width.saturating_sub(NAME_WIDTH + 1));
    let rows = lines.into_iter().map(|(name, value)| {
        let lines = wrapped(&value, width);
        let height = u16::try_from(lines.len()).unwrap_or(u16::MAX);
        Row::new([name.to_owned(), lines.join("\n")]).height(height)
    });
    let columns = [Constraint::Length(NAME_WIDTH), Constraint::Min(10)];
    frame.render_widget(Table::new(rows, columns), figures);
    let foot_line = if trouble.is_empty() {
        Line::from("q ends").dim()
    } else {
        Line::from(trouble.to_owned()).red()
    };
    frame.render_widget(foot_line, foot);
}

/// Wraps `text` at `width` characters. A longer word gets a separate line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn gauge(name: &str, share: f64, colour: Color) -> Gauge<'static> {
    let style = Style::new().fg(colour).bg(Color::DarkGray);
    let label = format!("{name} {}", percent(share));
    Gauge::default().gauge_style(style).ratio(share.clamp(0.0, 1.0)).label(label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ritornello_store::Options;

    #[test]
    fn wrapping_keeps_words_whole() {
        assert_eq!(wrapped("5 leases, 2 clients", 9), ["5 leases,", "2 clients"]);
        assert_eq!(wrapped("quarantined", 4), ["quarantined"]);
        assert_eq!(wrapped("", 4), [""]);
    }

    #[test]
    fn screen_shows_every_figure() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut options = Options::new(dir.path());
        (options.capacity, options.segment_bytes) = (Some(16 << 20), Some(1 << 20));
        let node = ritornello_node::open(&options).unwrap();
        let sample = || Sample::new(dir.path().to_owned(), node.store().stats().unwrap().catalog);
        let (before, now) = (sample(), sample());
        let snapshot = Snapshot::between(Some(&before), &now);
        for (width, height) in [(120, 20), (80, 24), (40, 50)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &snapshot, "the owner is away")).unwrap();
            let screen = terminal.backend().to_string();
            for word in [
                "full 0.0 %",
                "hits 0.0 %",
                "process",
                "quarantined",
                "leases",
                "adaptive",
                "per second",
                "away",
            ] {
                assert!(screen.contains(word), "{word}: {screen}");
            }
        }
        node.close().unwrap();
    }
}
